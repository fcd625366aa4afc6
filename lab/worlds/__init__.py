"""The making of the weights of the shipped world `shapes`."""

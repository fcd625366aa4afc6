"""The chain world beside the package's `shapes`, and the making of both worlds' weights."""

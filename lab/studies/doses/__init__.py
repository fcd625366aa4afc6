"""Weights of the chain world that can use a worked solution in view, in several doses, and what methods make of them."""

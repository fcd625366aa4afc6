"""The chain world, in which steps depend on each other and few tokens decide."""

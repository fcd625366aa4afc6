"""What only processors use: fused decoding, and the choice of the library that multiplies matrices."""

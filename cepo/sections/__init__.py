"""Declares sections of settings and reads them; errors name the key, its value and the accepted values."""

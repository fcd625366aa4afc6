"""Provides problems, images and contexts, and decides the order of problems."""

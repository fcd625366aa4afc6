"""Writes to the terminal and hears its signals: lines, a live view, progress, interrupts."""

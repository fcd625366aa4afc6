"""Where workers run. `local`: in this process, on one device."""

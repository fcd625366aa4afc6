"""Where workers run. `local`: in this process, on one device. `ray`: one process per device, on one machine or many."""

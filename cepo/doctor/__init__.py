"""`cepo doctor`: whether training could start on this machine, and what to do where it could not."""

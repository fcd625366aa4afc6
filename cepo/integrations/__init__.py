"""Puts cepo's methods into other trainers; each module needs the library that it is named after."""

"""The command line: one module for each command or group, loaded when it is used."""

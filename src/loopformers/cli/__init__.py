"""The command line: one file a command, listed in `main`. Importing this loads nothing."""

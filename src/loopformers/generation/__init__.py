"""Exit rules: how many loops a token gets when it is generated."""

"""A pipeline that no file describes: its networks, calls, layers and graphs are found by running it and looking on."""

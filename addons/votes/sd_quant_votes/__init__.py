"""Blind votes on the images of a finished folder: the page on which people vote, and the count of their votes."""

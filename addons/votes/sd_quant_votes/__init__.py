"""Blind pairwise votes on the images of a report's folder: the page for voting and the count of the votes."""

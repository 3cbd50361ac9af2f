"""Ranks that may die: the others form their process group again in place, make at most one update again, and a replacement joins them."""

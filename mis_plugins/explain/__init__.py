"""A config as formulas, in words and at work on six tokens; files of other frameworks in this pack's spelling."""

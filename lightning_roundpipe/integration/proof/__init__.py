"""Shows on the user's first batch that splitting it changes nothing; :mod:`proof` puts it together.

- :mod:`trial`: runs a step, looks at what it gives and leaves, and puts everything back.
- :mod:`draws`: the same random numbers for the same rows.
- :mod:`watching`: what operators of a step draw, and write.
- :mod:`snapshot`: attributes and containers as they were.
- :mod:`finding`, :mod:`comparison`, :mod:`causes`: what differs, what that means, and why.
"""

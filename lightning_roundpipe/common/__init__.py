"""What every part may use. Imports torch alone.

- :mod:`errors`: exceptions that several parts raise or catch.
- :mod:`fingerprints`, :mod:`sizes`: whether a tensor has changed, and how large it is.
- :mod:`trees`, :mod:`attributes`: nested containers; attributes of modules and objects.
- :mod:`graphs`, :mod:`dispatch`: autograd graphs, and modes that see operators.
- :mod:`threads`, :mod:`thread_locals`: threads of a step, and objects that each of them has one of.
- :mod:`seeds`, :mod:`pages`: seeds of random numbers, and pages of the host's memory.
"""

"""Extensions: one folder each. Every one can be deleted, with its tests, and the rest still works.

The core finds them by ``fxpipe/extend.py`` and imports none. The modules beside the folders are no
extensions, but what several of them share.
"""

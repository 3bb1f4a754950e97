"""Outrider inside other frameworks: one module per framework, each imported by its user and by nothing else.

A module here translates: it gives a framework what it asks of a distributed backend (a strategy, a mixin, a function
that a worker runs) and passes the work to a `Session`. Nothing in the rest of the package imports one of them, so that
`import outrider` needs none of these frameworks.
"""

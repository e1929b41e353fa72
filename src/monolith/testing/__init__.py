"""Simulation: a whole cluster in one process, on virtual time, in an order that one seed decides.

For the tests of this project and for those of a task of your own.
"""

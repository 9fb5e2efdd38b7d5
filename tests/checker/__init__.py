"""Judges what a server did to runs from a record that the database itself kept.

`Recorder` keeps it, `history` reads it, and `invariants` says what must hold whatever was
killed, frozen or cut meanwhile. The product's code is not used: the tables of states and of
fires here are a second opinion.
"""

"""Tests of the Python SDK against a scripted server on a real socket."""

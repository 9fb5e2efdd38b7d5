"""The demo worker: what a user's own worker looks like, and nothing but the SDK.

    python -m fencepost_server.dev.demo localhost:7600
"""

"""Measured choices: how they are stored, looked up and activated."""

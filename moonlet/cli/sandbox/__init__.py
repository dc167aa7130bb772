"""`moonlet sandbox ...`: machines that pause, from the command line."""

from moonlet.cli.sandbox.commands import app

__all__ = ["app"]

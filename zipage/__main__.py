"""``python -m zipage`` is the command `zipage`."""

from zipage.cli import app

app()

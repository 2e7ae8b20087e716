"""``python -m zipage`` is the command `zipage`."""

from zipage.cli import app

# Processes that multiprocessing starts import this module too.
if __name__ == "__main__":
    app()

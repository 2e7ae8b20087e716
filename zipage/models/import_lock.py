"""transformers imports its parts lazily; of two threads at once, one may see it half imported."""

import threading

#: Held while anything of transformers is imported for the first time.
IMPORT_LOCK = threading.RLock()

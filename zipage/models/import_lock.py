"""transformers imports itself piece by piece; two threads at once may see it half done."""

import threading

#: Held while anything of transformers is imported for the first time.
IMPORT_LOCK = threading.RLock()

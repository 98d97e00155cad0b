"""What the garbage collector goes through in a process that serves: what it makes, not what it has imported."""

import atexit
import gc


def freeze_imports() -> None:
    """Torch and transformers are 400,000 objects that stay. A full collection through them takes a quarter of a second, in the midst of a
    step or between two tokens of every stream. Undone at the interpreter's end, where bindings count what is not collected as leaked.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)

"""Commands are tested as processes beside this one: both load the compiler for TPUs, which takes a lock otherwise."""

import os

os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")

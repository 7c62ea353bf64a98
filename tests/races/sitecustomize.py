"""Have the threads of every Python process take turns a thousand times as often as they do."""

import sys

sys.setswitchinterval(1e-6)

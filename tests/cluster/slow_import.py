"""A rank's code that takes long to import."""

import time

time.sleep(60)

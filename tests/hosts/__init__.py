"""Several hosts on one machine: see machines.py."""

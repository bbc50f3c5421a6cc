"""What the notebooks of the course import: `exercises` checks answers, `clinic` and `pains` have known troubles of FSDP."""

"""The nouns that every floor shares: Spec, events, schedule, links, faults, and how files and text are written. No torch."""

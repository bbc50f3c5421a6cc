"""All that a Spec is made of, its rules and its text, and the specifications of links and faults. No torch here."""

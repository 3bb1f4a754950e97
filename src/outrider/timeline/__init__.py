"""What happened when: events, recorder, exporters. Knows no torch."""

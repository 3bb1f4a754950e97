"""`outrider init`: a complete project from a template. Knows no torch; the templates do."""

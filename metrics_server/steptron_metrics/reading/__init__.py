"""Reading what a server has stored: as data frames, and as files for other tools."""

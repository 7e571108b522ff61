"""Operations of the model, each in a folder of its own: a plain version, which is the definition, and faster ones."""

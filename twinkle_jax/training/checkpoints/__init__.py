"""What a run leaves on the disk, so that another process can go on with it."""

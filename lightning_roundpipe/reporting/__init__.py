"""What a run tells about itself: timelines, pictures, memory of the host. Knows Lightning and matplotlib."""

"""What a process really runs, seen from inside it, and the file that tells it to the doctor."""

"""All schedules of the library in one table: time, bubble, memory and versions."""

"""What people see: tables, pictures and progress, on the terminal."""

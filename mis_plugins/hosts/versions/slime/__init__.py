"""What slime alone does, as read in slime 624b824."""

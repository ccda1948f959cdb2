"""What a person looks at while and after it runs: progress, timelines. Needs the extras."""

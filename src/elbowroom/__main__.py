from elbowroom.cli import main

main()

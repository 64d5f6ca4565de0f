# cmake -DNM=nm "-DOBJECTS=a.o;b.o" -P check_symbols.cmake
# Fails when an ISA object defines more than its tables and what attend_entry.h declares. The linker might keep its copy
# of a weak symbol for the whole library, and AVX code would crash a CPU without it.
foreach(object ${OBJECTS})
  execute_process(COMMAND ${NM} --extern-only --defined-only --demangle ${object}
                  OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX REPLACE "[0-9a-f]+ ([DR] fluxion::[a-z0-9]+::kTables|T void fluxion::[a-z0-9]+::attend[a-z_]*<[^\n]*)\n" ""
         others "${symbols}")
  if(symbols STREQUAL "" OR NOT others STREQUAL "")
    message(FATAL_ERROR "${object} must define its tables or its attention and nothing else with external linkage; put the "
                        "rest into an unnamed namespace:\n${others}")
  endif()
endforeach()

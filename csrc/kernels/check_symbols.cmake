# cmake -DNM=nm -DOBJECT=a.o -P check_symbols.cmake
# Fails when an ISA object defines anything but its tables. A weak symbol compiled with AVX instructions could be the
# copy that the linker keeps for the whole library, and a CPU without AVX would die of it.
execute_process(COMMAND ${NM} --extern-only --defined-only --demangle ${OBJECT}
                OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(REGEX REPLACE "[0-9a-f]+ [DR] fluxion::[a-z0-9]+::kTables\n" "" others "${symbols}")
if(symbols STREQUAL "" OR NOT others STREQUAL "")
  message(FATAL_ERROR "${OBJECT} must define its tables and nothing else with external linkage; put the rest into an "
                      "unnamed namespace:\n${others}")
endif()

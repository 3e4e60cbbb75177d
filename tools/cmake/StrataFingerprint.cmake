# Writes strata/fingerprint.h: a hash of the public headers joined, by the compiler that builds the plugin, with what
# else must agree before C++ objects may cross the library border.
file(GLOB headers CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/include/strata/*.h)
set(text "")
foreach(header ${headers})
  file(SHA256 ${header} hash)
  string(APPEND text ${hash})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${header})
endforeach()
string(SHA256 STRATA_HEADER_HASH "${text}")
string(SUBSTRING ${STRATA_HEADER_HASH} 0 16 STRATA_HEADER_HASH)
configure_file(${CMAKE_CURRENT_LIST_DIR}/fingerprint.h.in ${CMAKE_BINARY_DIR}/generated/strata/fingerprint.h @ONLY)
